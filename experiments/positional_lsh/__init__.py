"""What is ALiBi made of random blocks worth?"""
